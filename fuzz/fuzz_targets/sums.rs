//! Makes the checksum of each tar header fit: of one that does not, nothing else would be looked at.

pub fn fitted(archive: &[u8]) -> Vec<u8> {
    let mut archive = archive.to_vec();
    for header in archive.chunks_exact_mut(512).filter(|block| block.iter().any(|&b| b != 0)) {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    archive
}
