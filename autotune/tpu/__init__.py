"""The instruments: TPU generations, the compiler without a TPU, and the schedule that it lists."""
