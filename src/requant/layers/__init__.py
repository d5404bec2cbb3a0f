"""What models are made of: linears in any format, norms, embedding, rotary embedding, attention."""
