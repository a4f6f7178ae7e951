use super::*;
use proptest::prelude::*;
use prost::Message as _;

/// The message by the rules of its .proto file.
#[derive(Clone, PartialEq, prost::Message)]
struct Typed {
    #[prost(bool, repeated, tag = "1")]
    bools: Vec<bool>,
    #[prost(int32, repeated, tag = "2")]
    ints: Vec<i32>,
    #[prost(int64, repeated, packed = "false", tag = "3")]
    int64s: Vec<i64>,
    #[prost(uint32, repeated, tag = "4")]
    uints: Vec<u32>,
    #[prost(uint64, repeated, tag = "5")]
    uint64s: Vec<u64>,
    #[prost(float, repeated, packed = "false", tag = "6")]
    fp32s: Vec<f32>,
    #[prost(double, repeated, tag = "7")]
    fp64s: Vec<f64>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    strings: Vec<Vec<u8>>,
}

fn contents(typed: &Typed) -> Contents {
    Contents::decode(&typed.encode_to_vec()[..]).unwrap()
}

fn data(typed: &Typed, datatype: DataType, elements: usize) -> Result<Vec<u8>, String> {
    let data = contents(typed).into_data(datatype, elements, "inputs[0].contents");
    data.map(|data| data.to_contiguous().to_vec()).map_err(|fault| fault.to_string())
}

fn flat<const N: usize, T: Copy>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&value| bytes(value)).collect()
}

proptest! {
    #[test]
    fn every_kind_of_list_becomes_the_same_numbers_in_binary_form(
        bools in prop::collection::vec(any::<bool>(), 0..40),
        ints in prop::collection::vec(any::<i32>(), 0..40),
        int64s in prop::collection::vec(any::<i64>(), 0..40),
        uints in prop::collection::vec(any::<u32>(), 0..40),
        uint64s in prop::collection::vec(any::<u64>(), 0..40),
        fp32s in prop::collection::vec(any::<f32>(), 0..40),
        fp64s in prop::collection::vec(any::<f64>(), 0..40),
        strings in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..20),
    ) {
        let none = Typed::default();
        let check = |typed: Typed, datatype, count, expected: Vec<u8>| {
            prop_assert_eq!(data(&typed, datatype, count), Ok(expected));
            // What is written again is the same message to any reader.
            let written = contents(&typed);
            prop_assert_eq!(written.encode_to_vec().len(), written.encoded_len());
            let again = Typed::decode(&written.encode_to_vec()[..]).unwrap();
            prop_assert_eq!(again.encode_to_vec(), typed.encode_to_vec());
            Ok(())
        };
        check(Typed { bools: bools.clone(), ..none.clone() }, DataType::Bool, bools.len(), flat(&bools, |b| [u8::from(b)]))?;
        check(Typed { ints: ints.clone(), ..none.clone() }, DataType::Int32, ints.len(), flat(&ints, i32::to_le_bytes))?;
        check(Typed { int64s: int64s.clone(), ..none.clone() }, DataType::Int64, int64s.len(), flat(&int64s, i64::to_le_bytes))?;
        check(Typed { uints: uints.clone(), ..none.clone() }, DataType::Uint32, uints.len(), flat(&uints, u32::to_le_bytes))?;
        check(Typed { uint64s: uint64s.clone(), ..none.clone() }, DataType::Uint64, uint64s.len(), flat(&uint64s, u64::to_le_bytes))?;
        check(Typed { fp32s: fp32s.clone(), ..none.clone() }, DataType::Fp32, fp32s.len(), flat(&fp32s, f32::to_le_bytes))?;
        check(Typed { fp64s: fp64s.clone(), ..none.clone() }, DataType::Fp64, fp64s.len(), flat(&fp64s, f64::to_le_bytes))?;
        let binary = strings.iter().flat_map(|s| [&(s.len() as u32).to_le_bytes()[..], s].concat()).collect();
        check(Typed { strings: strings.clone(), ..none }, DataType::Bytes, strings.len(), binary)?;
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), elements in 0usize..300) {
        if let Ok(contents) = Contents::decode(&bytes[..]) {
            for datatype in DataType::ALL {
                let _ = contents.clone().into_data(datatype, elements, "x");
            }
        }
    }
}

#[test]
fn small_integers_travel_in_the_wider_lists_and_are_not_wrapped() {
    let ints = |ints: &[i32]| Typed { ints: ints.to_vec(), ..Typed::default() };
    assert_eq!(data(&ints(&[-128, 127]), DataType::Int8, 2), Ok(vec![128, 127]));
    assert_eq!(data(&ints(&[-2]), DataType::Int16, 1), Ok(vec![254, 255]));
    let wide = data(&ints(&[0, 128]), DataType::Int8, 2).unwrap_err();
    assert_eq!(wide, "inputs[0].contents.int_contents[1] is out of the range of the tensor's datatype");
    let uints = Typed { uints: vec![65536], ..Typed::default() };
    assert!(data(&uints, DataType::Uint16, 1).unwrap_err().contains("uint_contents[0]"));
    assert_eq!(data(&uints, DataType::Uint32, 1), Ok(vec![0, 0, 1, 0]));
}

#[test]
fn what_does_not_fit_is_named() {
    let typed = Typed { fp32s: vec![1.0, 2.0], ..Typed::default() };
    for (datatype, elements, expected) in [
        (DataType::Fp32, 3, "fp32_contents has 2 elements, but the tensor's shape needs 3"),
        (DataType::Fp64, 2, "a tensor of FP64 has fp64_contents and nothing else"),
        (DataType::Fp16, 2, "FP16 has no typed form; use raw_input_contents"),
    ] {
        let fault = data(&typed, datatype, elements).unwrap_err();
        assert!(fault.starts_with("inputs[0].contents") && fault.contains(expected), "{fault}");
    }
    let many = Typed { int64s: vec![1; 1000], ..Typed::default() };
    assert!(data(&many, DataType::Int64, 1).unwrap_err().contains("more than the 1 elements"));
    let mixed = Typed { ints: vec![1], ..typed };
    assert!(data(&mixed, DataType::Fp32, 2).unwrap_err().contains("nothing else"));
    assert_eq!(data(&Typed::default(), DataType::Int64, 0), Ok(vec![]));
}
