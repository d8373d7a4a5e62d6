"""Figures of the chapters, a file for each: functions that take a page's numbers and return a drawing."""
