// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestSetEnvironment: the programs that are asked see a known environment.
func TestSetEnvironment(t *testing.T) {
	isolate(t)
	t.Setenv("XTABLES_LIBDIR", "/nowhere")
	t.Setenv("CNI_COMMAND", "ADD")
	t.Setenv("LC_ALL", "de_DE.UTF-8")
	for _, variable := range os.Environ() { // for what follows this test
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	file := t.TempDir() + "/environment"
	path := pathWith(t, map[string]string{"iptables-nft": listing("/usr/bin/env >" + file)})
	d := New(path)
	SetEnvironment("CNI_")
	_, err := d.programs.list(t.Context(), policy.IPv4, netfilter.VariantNFT, postrouting)
	assert.NoError(t, err)
	text := assert.Must(os.ReadFile(file))(t)
	var got []string
	for line := range strings.Lines(string(text)) {
		name, _, _ := strings.Cut(line, "=")
		if !slices.Contains([]string{"_", "PWD", "OLDPWD", "SHLVL"}, name) { // of the shell
			got = append(got, strings.TrimSpace(line))
		}
	}
	slices.Sort(got)
	assert.Equal(t, "environment", got, []string{"CNI_COMMAND=ADD", "LC_ALL=C", "PATH=" + childPath})
}
