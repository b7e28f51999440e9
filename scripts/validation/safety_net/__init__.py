"""What same_records.py and same_losses.py share: tiny models, and the processes that train them."""
