"""What a chapter shows in a notebook besides pictures: exercises that check themselves, and widgets."""
