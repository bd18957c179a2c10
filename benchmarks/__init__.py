"""Side-by-side measurements that anyone can run again."""
