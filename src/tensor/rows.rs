//! Rows in and out of batches.
