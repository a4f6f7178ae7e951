//! Tensors that lie in the memory of a device, and what of ONNX Runtime's C interface has no safe wrapper for them.
//!
//! `unsafe`: a value over an address, binding it, and the list of which node runs where.
#![allow(unsafe_code)]

use crate::tensor::{DataType, Shape};
use ort::AsPointer;
use ort::memory::{Allocator, MemoryInfo};
use ort::session::{IoBinding, Session};
use ort::sys::{ONNXTensorElementDataType as Element, OrtStatusPtr, OrtValue};
use ort::value::{DynValue, ValueType};
use std::ffi::{CStr, CString, c_char};
use std::ptr::NonNull;

/// A value of ONNX Runtime over memory that it does not own.
pub(super) struct DeviceTensor(NonNull<OrtValue>);

impl Drop for DeviceTensor {
    fn drop(&mut self) {
        // SAFETY: a value that `over` made and nobody else releases; a binding has its own reference.
        unsafe { (ort::api().ReleaseValue)(self.0.as_ptr()) };
    }
}

/// Where a tensor lies and what it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) info: &'a MemoryInfo<'static>,
    pub(super) address: usize,
    pub(super) bytes: usize,
}

impl DeviceTensor {
    /// A tensor over these bytes, which must stay until no run uses it any more: whoever binds it keeps the block.
    ///
    /// # Errors
    /// ONNX Runtime's text.
    pub(super) fn over(place: Place<'_>, datatype: DataType, shape: &Shape) -> Result<Self, String> {
        let dims: Vec<i64> = shape.iter().map(|&dim| i64::try_from(dim).unwrap_or(i64::MAX)).collect();
        let mut value = std::ptr::null_mut();
        let address = std::ptr::with_exposed_provenance_mut(place.address);
        // SAFETY: ONNX Runtime stores the address and checks that the bytes suffice for the shape; it follows the address
        // during runs only. Breach: `device::answers_are_those_of_the_cpu`.
        let status = unsafe {
            let create = ort::api().CreateTensorWithDataAsOrtValue;
            let (info, count) = (place.info.ptr(), dims.len());
            create(info, address, place.bytes, dims.as_ptr(), count, element(datatype), &raw mut value)
        };
        done(status)?;
        NonNull::new(value).map(Self).ok_or_else(|| "ONNX Runtime made no value".to_owned())
    }

    /// Makes it an input of the runs of a binding. Nothing is copied if it is where the model wants it.
    ///
    /// # Errors
    /// ONNX Runtime's text.
    pub(super) fn bind_input(&self, binding: &mut IoBinding, name: &CStr) -> Result<(), String> {
        // SAFETY: all three live through the call; the binding takes a reference of its own.
        done(unsafe { (ort::api().BindInput)(binding.ptr_mut(), name.as_ptr(), self.0.as_ptr()) })
    }

    /// Makes it an output of the runs of a binding, at this very address.
    ///
    /// # Errors
    /// ONNX Runtime's text.
    pub(super) fn bind_output(&self, binding: &mut IoBinding, name: &CStr) -> Result<(), String> {
        // SAFETY: as above.
        done(unsafe { (ort::api().BindOutput)(binding.ptr_mut(), name.as_ptr(), self.0.as_ptr()) })
    }

    /// As a value that several sessions may have.
    pub(super) fn into_value(self) -> DynValue {
        let raw = self.0;
        std::mem::forget(self);
        // The allocator is asked for by the wrapper and used by nobody: the value does not own its memory.
        // SAFETY: a value whose one reference is handed over.
        unsafe { DynValue::from_ptr(raw, Some(&Allocator::default())) }
    }
}

/// Where a tensor lies, and its shape.
///
/// # Errors
/// If it is not a tensor of this datatype.
pub(super) fn look_at(value: &DynValue, wanted: DataType) -> Result<(usize, Shape), String> {
    let ValueType::Tensor { ty, shape, .. } = value.dtype() else {
        return Err("the output is not a tensor".to_owned());
    };
    if super::element::datatype(*ty) != Some(wanted) {
        return Err(format!("the output has element type {ty:?}, expected {wanted}"));
    }
    let shape: Shape = shape.iter().map(|&dim| usize::try_from(dim).unwrap_or(0)).collect();
    let mut address = std::ptr::null_mut();
    // SAFETY: a tensor that lives through the call, which writes one address.
    done(unsafe { (ort::api().GetTensorMutableData)(value.ptr().cast_mut(), &raw mut address) })?;
    Ok((address.expose_provenance(), shape))
}

/// The operators of a session that a provider runs, each as often as it occurs. Empty where ONNX Runtime does not say.
pub(super) fn operators_of(session: &Session, provider: &str) -> Vec<String> {
    let (mut graphs, mut count) = (std::ptr::null(), 0);
    let mut found = Vec::new();
    // SAFETY: the lists belong to the session, which lives through all of this; each call writes what it is given an address
    // of, and the texts end with a null byte.
    unsafe {
        let api = ort::api();
        if done((api.Session_GetEpGraphAssignmentInfo)(session.ptr(), &raw mut graphs, &raw mut count)).is_err() {
            return found;
        }
        for graph in (0..count).map(|index| *graphs.add(index)) {
            let mut name = std::ptr::null();
            let (mut nodes, mut nodes_count) = (std::ptr::null(), 0);
            let named = done((api.EpAssignedSubgraph_GetEpName)(graph, &raw mut name));
            if named.is_err() || text(name) != provider {
                continue;
            }
            if done((api.EpAssignedSubgraph_GetNodes)(graph, &raw mut nodes, &raw mut nodes_count)).is_err() {
                continue;
            }
            for node in (0..nodes_count).map(|index| *nodes.add(index)) {
                let mut operator = std::ptr::null();
                if done((api.EpAssignedNode_GetOperatorType)(node, &raw mut operator)).is_ok() {
                    found.push(text(operator));
                }
            }
        }
    }
    found
}

/// SAFETY of callers: null, or a text that ends with a null byte.
unsafe fn text(pointer: *const c_char) -> String {
    // SAFETY: as the callers say.
    if pointer.is_null() { String::new() } else { unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned() }
}

/// A name as the C interface takes it.
pub(super) fn c_name(name: &str) -> CString {
    CString::new(name).unwrap_or_default()
}

fn done(status: OrtStatusPtr) -> Result<(), String> {
    // SAFETY: a status that was just returned and is used once.
    unsafe { ort::Error::result_from_status(status) }.map_err(|error| error.message().to_owned())
}

fn element(datatype: DataType) -> Element {
    match datatype {
        DataType::Bool => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
        DataType::Uint8 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
        DataType::Uint16 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,
        DataType::Uint32 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,
        DataType::Uint64 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64,
        DataType::Int8 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
        DataType::Int16 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,
        DataType::Int32 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
        DataType::Int64 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
        DataType::Fp16 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        DataType::Bf16 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
        DataType::Fp32 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        DataType::Fp64 => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
        DataType::Bytes => Element::ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING,
    }
}
