"""What comes out: predictions, plans, programs, simulations, measurements, profiles, calibrations."""
