-- Argus schema, version 20: attention of running jobs is told by PyTorch's operators, too.

ALTER TABLE kernel_flops COMMENT COLUMN operator 'What launched the kernels: PyTorch''s operator (aten::mm, aten::_scaled_dot_product_flash_attention, …), of running jobs cuBLAS''s function or PyTorch''s operator of attention; empty: kernels that are such by their names, and nothing tells their shapes';
