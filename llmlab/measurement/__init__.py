"""What a run costs on the machine at hand, taken from the real device. `lab.measure` calls measurement/report.py."""
