"""What several patterns of the zoo are made of, and what models must know of each."""
