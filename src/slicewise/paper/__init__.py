"""The paper: its published figures as data, and how ours compare with them."""
