import assert from "node:assert/strict";
import { test } from "node:test";
import { toCsv } from "../src/lib/table.ts";

test("curves measured at different steps share one table", () => {
  const table = toCsv([
    { name: "loss", steps: [0, 2], values: [1, 0.5] },
    { name: 'a "quoted", name', steps: [1, 2], values: [null, 3] },
  ]);
  assert.equal(table, 'step,loss,"a ""quoted"", name"\n0,1,\n1,,\n2,0.5,3\n');
});
