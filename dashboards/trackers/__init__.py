"""A run in the trackers that people have already: TensorBoard, MLflow, Weights & Biases, and OpenTelemetry's collectors."""
