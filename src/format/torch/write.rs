//! What `torch.save` writes: a zip archive with a pickle and the storages that it refers to.
//!
//! Types that have a storage class of their own are rebuilt as torch has always done, the others over bytes as newer versions
//! do. Both kinds load with `weights_only=True` and with `mmap=True`.

use ckfs_tensor::{DType, Region, Shape};

use super::super::pickle::write::Pickle;

/// Directory inside the archive.
pub const ROOT: &str = "archive";

/// Name in torch of a type, or `None` for those that torch has not.
pub fn dtype_name(dtype: DType) -> Option<&'static str> {
    if dtype == DType::F4 {
        // Since 2.8. Two of them are one element.
        return Some("float4_e2m1fn_x2");
    }
    dtype.element_bytes().map(|_| dtype.name())
}

/// The region in elements of torch, or `None` where that splits one: two 4-bit floats of a row are one element.
pub fn region(dtype: DType, region: &Region) -> Option<Region> {
    if dtype != DType::F4 {
        return Some(region.clone());
    }
    let mut ranges: Vec<_> = region.ranges().collect();
    let last = ranges.last_mut().filter(|last| last.start.is_multiple_of(2) && last.end.is_multiple_of(2))?;
    *last = last.start / 2..last.end / 2;
    let ends: Vec<u64> = ranges.iter().map(|range| range.end).collect();
    Region::within(&Shape::try_new(&ends).ok()?, &ranges)
}

/// As [`region`], for a whole tensor.
pub fn shape(dtype: DType, shape: &Shape) -> Option<Shape> {
    if dtype != DType::F4 {
        return Some(shape.clone());
    }
    let ranges: Vec<_> = shape.extents().iter().map(|extent| 0..*extent).collect();
    Some(region(dtype, &Region::within(shape, &ranges)?)?.shape().clone())
}

/// Storage classes with the type of their elements.
pub(super) const STORAGES: [(&str, DType); 11] = [
    ("BoolStorage", DType::Bool),
    ("ByteStorage", DType::U8),
    ("CharStorage", DType::I8),
    ("ShortStorage", DType::I16),
    ("HalfStorage", DType::F16),
    ("BFloat16Storage", DType::BF16),
    ("IntStorage", DType::I32),
    ("FloatStorage", DType::F32),
    ("ComplexFloatStorage", DType::C64),
    ("DoubleStorage", DType::F64),
    ("LongStorage", DType::I64),
];

/// Storage class of a type, where it has one.
fn storage(dtype: DType) -> Option<&'static str> {
    STORAGES.iter().find(|(_, of)| *of == dtype).map(|(class, _)| *class)
}

/// Pushes a contiguous tensor whose elements are storage number `number`; `None` if torch has not the type.
pub fn tensor(pickle: &mut Pickle, number: usize, dtype: DType, shape: &Shape) -> Option<()> {
    let typed = storage(dtype);
    pickle.global("torch._utils", if typed.is_some() { "_rebuild_tensor_v2" } else { "_rebuild_tensor_v3" });
    // The arguments, of which the first is a storage by its name.
    pickle.ops(b"((");
    pickle.word("storage");
    let elements = shape.elements();
    let count = if let Some(typed) = typed {
        pickle.global("torch", typed);
        elements
    } else {
        pickle.global("torch.storage", "UntypedStorage");
        dtype.bytes_of(elements)?
    };
    pickle.text(&number.to_string());
    pickle.word("cpu");
    pickle.int(count);
    pickle.ops(b"tQ");
    // Offset in the storage, sizes, strides, no gradient, no hooks.
    pickle.int(0);
    let shape = self::shape(dtype, shape)?;
    pickle.ints(shape.extents());
    pickle.ints(&shape.strides());
    pickle.ops(b"\x89");
    pickle.global("collections", "OrderedDict");
    pickle.ops(b")R");
    if typed.is_none() {
        pickle.global("torch", dtype_name(dtype)?);
    }
    pickle.ops(b"tR");
    Some(())
}
