"""What was measured and is not worth its bytes here. It works, and is found by name, as what other packages bring."""
