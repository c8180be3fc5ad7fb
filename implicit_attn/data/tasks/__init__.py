"""Generated tasks: instances of any size, with their answers and how hard each is."""
