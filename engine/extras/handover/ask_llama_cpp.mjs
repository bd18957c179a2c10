// Answers prompts greedily with node-llama-cpp. Reads {package, model, tokens, prompts: [{ids, text}]} from standard
// input; its last line on standard output is {answers: [text], tokens: [[id]]}, the second as llama.cpp reads each text.
import {readFileSync} from "node:fs";
import {createRequire} from "node:module";
import {join} from "node:path";
import {pathToFileURL} from "node:url";

const asked = JSON.parse(readFileSync(0, "utf-8"));
const main = createRequire(join(asked.package, "package.json")).resolve(asked.package);
const {getLlama} = await import(pathToFileURL(main).href);
const llama = await getLlama({gpu: false, build: "never", logLevel: "warn"});
const model = await llama.loadModel({modelPath: asked.model});
const longest = Math.max(...asked.prompts.map(({ids}) => ids.length));
const context = await model.createContext({contextSize: Math.max(256, longest + asked.tokens + 8)});
const answers = [], tokens = [];
for (const {ids, text} of asked.prompts) {
    const sequence = context.getSequence();
    const made = [];
    for await (const token of sequence.evaluate(ids, {temperature: 0})) {
        if (model.isEogToken(token)) break;
        made.push(token);
        if (made.length >= asked.tokens) break;
    }
    answers.push(model.detokenize(made, false));
    const read = [...model.tokenize(text, true)];
    const start = model.tokens.shouldPrependBosToken ? model.tokens.bos : null;
    tokens.push(start != null && ids[0] === start && read[0] !== start ? [start, ...read] : read);
    sequence.dispose();
}
process.stdout.write("\n" + JSON.stringify({answers, tokens}) + "\n", () => process.exit(0));
