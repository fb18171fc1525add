"""What every room stands on: settings' facts, errors, redaction, files of others, text."""
