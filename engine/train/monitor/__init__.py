"""What is measured and recorded around steps."""
