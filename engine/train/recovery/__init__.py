"""What happens after an allocation failure."""
