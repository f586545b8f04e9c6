"""Commands that are independent of each other, and that no other package needs."""
