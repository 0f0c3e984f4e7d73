"""What comes after training: tasks that a model is tried on."""
