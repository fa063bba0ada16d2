//! The names of a transformer's modules in the original checkpoints, which files of the community have kept.

/// Modules of a block: diffusers' name and the original one.
const OF_BLOCKS: [(&str, &str); 20] = [
    ("attn1.to_q", "self_attn.q"),
    ("attn1.to_k", "self_attn.k"),
    ("attn1.to_v", "self_attn.v"),
    ("attn1.to_out.0", "self_attn.o"),
    ("attn1.norm_q", "self_attn.norm_q"),
    ("attn1.norm_k", "self_attn.norm_k"),
    ("attn2.to_q", "cross_attn.q"),
    ("attn2.to_k", "cross_attn.k"),
    ("attn2.to_v", "cross_attn.v"),
    ("attn2.to_out.0", "cross_attn.o"),
    ("attn2.norm_q", "cross_attn.norm_q"),
    ("attn2.norm_k", "cross_attn.norm_k"),
    ("attn2.add_k_proj", "cross_attn.k_img"),
    ("attn2.add_v_proj", "cross_attn.v_img"),
    ("attn2.norm_added_k", "cross_attn.norm_k_img"),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    ("norm2", "norm3"),
    ("proj_in", "before_proj"),
    ("proj_out", "after_proj"),
];

/// Modules outside of blocks.
const OF_MODEL: [(&str, &str); 11] = [
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
    ("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
    ("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
    ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
    ("condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"),
    ("proj_out", "head.head"),
];

/// The original name of a module, or of a parameter without a module, from its name in diffusers.
pub(crate) fn original_name(name: &str) -> String {
    let of = |table: &[(&str, &str)], name: &str| {
        table.iter().find(|(diffusers, _)| *diffusers == name).map_or(name, |(_, original)| original).to_owned()
    };
    let in_block = |name: &str| {
        let (list, rest) = name.split_once("blocks.")?;
        let (number, module) = rest.split_once('.')?;
        let module = if module == "scale_shift_table" { "modulation".into() } else { of(&OF_BLOCKS, module) };
        Some(format!("{list}blocks.{number}.{module}"))
    };
    in_block(name).unwrap_or_else(|| match name {
        "scale_shift_table" => "head.modulation".into(),
        name => of(&OF_MODEL, name),
    })
}

/// The original name of a parameter, from its name in diffusers.
pub(crate) fn original_parameter(name: &str) -> String {
    match name.rsplit_once('.') {
        Some((module, end @ ("weight" | "bias"))) => format!("{}.{end}", original_name(module)),
        _ => original_name(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_have_their_original_names() {
        for (name, original) in [
            ("blocks.10.attn1.to_out.0", "blocks.10.self_attn.o"),
            ("blocks.0.norm2", "blocks.0.norm3"),
            ("blocks.0.scale_shift_table", "blocks.0.modulation"),
            ("vace_blocks.1.proj_out", "vace_blocks.1.after_proj"),
            ("proj_out", "head.head"),
            ("scale_shift_table", "head.modulation"),
            ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
            ("patch_embedding", "patch_embedding"),
        ] {
            assert_eq!(original_name(name), original);
        }
        for (name, original) in [
            ("blocks.10.ffn.net.0.proj.weight", "blocks.10.ffn.0.weight"),
            ("blocks.3.attn2.norm_added_k.weight", "blocks.3.cross_attn.norm_k_img.weight"),
            ("blocks.0.scale_shift_table", "blocks.0.modulation"),
            ("condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"),
            ("condition_embedder.time_proj.bias", "time_projection.1.bias"),
        ] {
            assert_eq!(original_parameter(name), original);
        }
    }
}
