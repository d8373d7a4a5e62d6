"""What simulation and measurement share: allocation events, phase marks, parts of the peak, and timing."""
