//! Shape classes: the non-batch dimensions of a model's inputs, numbered.

use crate::units::ClassId;
use std::collections::HashMap;

/// The most shape classes that a model remembers; beyond it the numbering begins anew once nothing of it is in use.
pub(super) const MAX_CLASSES: usize = 4096;

/// The classes of one model.
#[derive(Debug, Default)]
pub(super) struct Classes {
    by_dims: HashMap<Vec<usize>, ClassId>,
    next: u32,
}

impl Classes {
    /// The class of these dimensions. Numbers are never used for two shapes, so a forgotten class only costs a new number.
    pub(super) fn id(&mut self, dims: &[usize]) -> ClassId {
        if let Some(&id) = self.by_dims.get(dims) {
            return id;
        }
        if self.by_dims.len() >= MAX_CLASSES {
            self.by_dims.clear();
        }
        let id = ClassId(self.next);
        self.next += 1;
        self.by_dims.insert(dims.to_vec(), id);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_dimensions_share_a_class_and_no_number_is_used_twice() {
        let mut classes = Classes::default();
        let first = classes.id(&[8, 3]);
        assert_eq!(classes.id(&[8, 3]), first);
        let mut seen = vec![first];
        for size in 0..2 * MAX_CLASSES {
            let id = classes.id(&[size]);
            assert!(!seen.contains(&id) || size == 0, "{id} was used for two shapes");
            seen.push(id);
        }
        assert!(classes.by_dims.len() <= MAX_CLASSES);
    }
}
