"""What people look at: the model card and pictures of the windows."""
