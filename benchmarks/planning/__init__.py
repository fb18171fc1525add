"""What a plan says, beside what is measured here and what others have published."""
