"""Schedules for GPUs: layouts, templates, and the ladder that gives every kernel one."""
