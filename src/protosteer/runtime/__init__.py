"""What a long run needs: checkpoints, progress, devices, executors."""
