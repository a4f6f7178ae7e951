//! Shape classes: the non-batch dimensions of a model's inputs, numbered; and families of those that may share a batch.

use crate::model::ValidRequest;
use crate::units::{ClassId, FamilyId};
use std::collections::HashMap;

/// The most shape classes that a model remembers; beyond it the numbering begins anew once nothing of it is in use.
pub(super) const MAX_CLASSES: usize = 4096;

/// The classes of one model.
#[derive(Debug, Default)]
pub(super) struct Classes {
    by_dims: HashMap<Vec<usize>, ClassId>,
    families: HashMap<ClassId, Option<FamilyId>>,
    by_family: HashMap<Vec<usize>, FamilyId>,
    next: u32,
    next_family: u32,
}

impl Classes {
    /// The class of a request, and its family.
    pub(super) fn of(&mut self, request: &ValidRequest) -> (ClassId, Option<FamilyId>) {
        let class = self.id(&request.class_dims);
        if let Some(family) = self.families.get(&class) {
            return (class, *family);
        }
        let family = request.family_dims().map(|dims| {
            let family = *self.by_family.entry(dims).or_insert(FamilyId(self.next_family));
            self.next_family = self.next_family.max(family.0 + 1);
            family
        });
        self.families.insert(class, family);
        (class, family)
    }

    /// The class of these dimensions. Numbers are never used for two shapes, so a forgotten class only costs a new number.
    pub(super) fn id(&mut self, dims: &[usize]) -> ClassId {
        if let Some(&id) = self.by_dims.get(dims) {
            return id;
        }
        if self.by_dims.len() >= MAX_CLASSES {
            self.by_dims.clear();
            self.families.clear();
            self.by_family.clear();
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
