"""Processes on this machine that form one group: started, watched and ended."""
