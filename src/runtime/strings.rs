//! String tensors of any bytes: the safe wrappers know only UTF-8 without NUL, and the protocol knows no such limit.
//!
//! `unsafe`: three functions of ONNX Runtime's C interface.
#![allow(unsafe_code)]

use super::RunError;
use bytes::Bytes;
use ort::AsPointer;
use ort::value::{DynValue, Tensor};

/// A string tensor of these elements.
///
/// # Errors
/// ONNX Runtime's text.
pub(super) fn create(shape: &[usize], elements: &[Bytes]) -> Result<Tensor<String>, String> {
    let text = |error: ort::Error| error.message().to_owned();
    let empty = vec![""; elements.len()];
    let mut tensor = Tensor::from_string_array((shape, empty.as_slice())).map_err(text)?;
    for (index, element) in elements.iter().enumerate().filter(|(_, element)| !element.is_empty()) {
        let mut buffer: *mut std::ffi::c_char = std::ptr::null_mut();
        // SAFETY: the value is a string tensor with at least `index + 1` elements, and nobody else has it; the call makes
        // element `index` as long as `element` and gives the address of its bytes, which stays valid until the element
        // changes. The test `strings_of_any_bytes_come_back` would show a wrong length or address.
        unsafe {
            let resize = ort::api().GetResizedStringTensorElementBuffer;
            let status = resize(tensor.ptr_mut(), index, element.len(), &raw mut buffer);
            ort::Error::result_from_status(status).map_err(text)?;
            std::ptr::copy_nonoverlapping(element.as_ptr(), buffer.cast(), element.len());
        }
    }
    Ok(tensor)
}

/// The elements of a string tensor.
///
/// # Errors
/// ONNX Runtime's text, or that there is no memory for a copy: how long strings are, a client may decide.
pub(super) fn extract(value: &DynValue, count: usize) -> Result<Vec<Bytes>, RunError> {
    let text = |error: ort::Error| RunError::Model(error.message().to_owned());
    let mut total = 0;
    // SAFETY: the value is a string tensor (the caller has checked its type); the call only writes `total`.
    let status = unsafe { (ort::api().GetStringTensorDataLength)(value.ptr(), &raw mut total) };
    // SAFETY: a status that was just returned and is used once.
    unsafe { ort::Error::result_from_status(status) }.map_err(text)?;
    let (mut content, mut offsets) = (zeros::<u8>(total)?, zeros::<usize>(count)?);
    // SAFETY: `content` has room for the `total` bytes that all elements have together, and `offsets` for one number per
    // element; the call checks both against the tensor and fails if they are too small.
    let status = unsafe {
        let read = ort::api().GetStringTensorContent;
        read(value.ptr(), content.as_mut_ptr().cast(), total, offsets.as_mut_ptr(), count)
    };
    // SAFETY: as above.
    unsafe { ort::Error::result_from_status(status) }.map_err(text)?;
    let content = Bytes::from(content);
    let ends = offsets.iter().copied().skip(1).chain(std::iter::once(total));
    Ok(offsets.iter().zip(ends).map(|(&start, end)| content.slice(start..end)).collect())
}

fn zeros<T: Clone + Default>(count: usize) -> Result<Vec<T>, RunError> {
    let mut out = Vec::new();
    out.try_reserve_exact(count).map_err(|error| RunError::OutOfMemory { message: error.to_string() })?;
    out.resize(count, T::default());
    Ok(out)
}
