"""What a ranking and its uncertainty are worth, in numbers and in pictures."""
