"""The drawings of the book's pages, a module for each subject: functions that take data and return a picture."""
