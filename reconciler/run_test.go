// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// TestWriterOf: the parent is that of the process that made the commit, while it runs.
func TestWriterOf(t *testing.T) {
	t.Parallel()
	proc := t.TempDir()
	for name, text := range map[string]string{
		"12/comm": "nft\n", "12/status": "Name:\tnft\nPid:\t12\nPPid:\t7\nUid:\t0\n",
		"7/comm":  "entrypoint.sh\n",
		"13/comm": "nft\n", "13/status": "PPid:\t0\n",
	} {
		file := filepath.Join(proc, name)
		assert.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		assert.NoError(t, os.WriteFile(file, []byte(text), 0o644))
	}
	const other = `"nft" (host pid 12)`
	for _, tt := range []struct {
		commit     nfnetlink.Commit
		proc, want string
	}{
		{nfnetlink.Commit{PID: 12, Program: "nft", Touched: true}, proc, `"nft" (host pid 12), started by "entrypoint.sh" (host pid 7)`},
		{nfnetlink.Commit{PID: 13, Program: "nft", Touched: true}, proc, `"nft" (host pid 13)`},
		{nfnetlink.Commit{PID: 12, Program: "nft"}, proc, other},
		{nfnetlink.Commit{PID: 12, Program: "nft", Touched: true}, "", other},
		{nfnetlink.Commit{PID: 12, Program: "iptables", Touched: true}, proc, `"iptables" (host pid 12)`}, // it has ended
		{nfnetlink.Commit{PID: 99, Program: "nft", Touched: true}, proc, `"nft" (host pid 99)`},
	} {
		if got := writerOf(tt.commit, tt.proc).String(); got != tt.want {
			t.Errorf("%+v: %s, want %s", tt.commit, got, tt.want)
		}
	}
}
