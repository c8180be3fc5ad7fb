"""Images with hidden patches."""
