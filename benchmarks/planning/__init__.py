"""Plans compared with measurements on this machine and with published figures."""
