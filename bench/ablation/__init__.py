"""What each rule of the inference is worth: switched off one at a time over cases and twins (README.md)."""
