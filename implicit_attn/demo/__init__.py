"""What ``implicit-attn demo`` shows: one energy for many tasks, Sudoku, an energy of your own."""
