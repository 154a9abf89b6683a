"""What the wheel was built with."""

VERSION: str
TORCH_VERSION: str
