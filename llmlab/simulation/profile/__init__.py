"""Where memory and time go in a simulated step: attribution, timeline, operators, roofline."""
