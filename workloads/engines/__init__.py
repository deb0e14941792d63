"""One training loop per framework; strategies plug into it. Job side only: modules here import their framework."""
