"""What the documentation site is built with, beside MkDocs itself."""
