"""Plans that let values wait in a second memory."""
