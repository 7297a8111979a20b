// What all scripts share: a client for the server that the environment names.
import OpenAI from "openai";

export const model = process.env.PENSTOCK_MODEL;
export const url = process.env.PENSTOCK_URL;

export function makeClient(options = {}) {
  return new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.PENSTOCK_KEY ?? "none", maxRetries: 0, ...options });
}

export const question = [{ role: "user", content: "What is the capital of France?" }];
