"""Figures of the chapters: one module per page, one function per figure, which takes its data as arguments."""
