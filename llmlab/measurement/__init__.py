"""What a run costs on the machine at hand, by its real device. `lab.measure` calls measurement/report.py."""
