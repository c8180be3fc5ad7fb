"""What the official code of Hyper-SET does besides its paper: trained gains, other steps, other networks."""
