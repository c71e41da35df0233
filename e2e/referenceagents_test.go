// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// referenceAgent is a test implementation of one of the two agents, after it has read its files and
// flags: kubernetes-sigs/ip-masq-agent@2926a054d95e:cmd/ip-masq-agent/ip-masq-agent.go and
// Azure/ip-masq-agent-v2@4d5c6bb35436:cmd/ip-masq-agent-v2/ip-masq-agent.go.
type referenceAgent struct {
	second                  bool // ip-masq-agent-v2
	chain                   string
	prefixes                []string
	masqLocal4, masqLocal6  bool
	ipv6, random            bool
	ports                   []string
	allowedPrefixes, stated int
}

// referenceFile has the keys that both agents read from a file.
type referenceFile struct {
	NonMasqueradeCIDRs []string `json:"nonMasqueradeCIDRs"`
	CIDRLimit          int      `json:"cidrLimit"`
	MasqLinkLocal      bool     `json:"masqLinkLocal"`
	MasqLinkLocalIPv6  bool     `json:"masqLinkLocalIPv6"`
}

// readAsAgent reads flags and files as an agent does, with Go's packages flag and encoding/json.
func readAsAgent(t *testing.T, dialect, dir string, args []string) referenceAgent {
	t.Helper()
	a := referenceAgent{second: dialect == "v2"}
	flags := flag.NewFlagSet("agent", flag.ContinueOnError)
	flags.StringVar(&a.chain, "masq-chain", "IP-MASQ-AGENT", "")
	reserved := flags.Bool("nomasq-all-reserved-ranges", false, "")
	flags.BoolVar(&a.ipv6, "enable-ipv6", false, "")
	var ports string
	if a.second {
		flags.Int("resync-interval", 60, "")
	} else {
		flags.BoolVar(&a.random, "random-fully", true, "")
		flags.StringVar(&ports, "to-ports", "", "")
	}
	for _, klog := range []string{"v", "stderrthreshold", "vmodule"} {
		flags.String(klog, "", "")
	}
	for _, klog := range []string{"logtostderr", "alsologtostderr", "add_dir_header", "skip_headers"} {
		flags.Bool(klog, false, "")
	}
	if err := flags.Parse(args); err != nil || flags.NArg() > 0 {
		t.Fatalf("the agent does not take the flags %q: %v", args, err)
	}
	if ports != "" {
		a.ports = strings.Split(ports, ",")
	}
	defaults := strings.Fields(defaultRanges)
	if *reserved {
		defaults = strings.Fields(allReserved)
	}
	if a.second {
		a.unite(t, dir, defaults)
	} else {
		a.readOne(t, dir, defaults)
	}
	if a.stated > a.allowedPrefixes {
		t.Fatalf("the agent refuses %d prefixes", a.stated)
	}
	return a
}

// readOne reads the one file of ip-masq-agent over the defaults: a missing key keeps its default.
func (a *referenceAgent) readOne(t *testing.T, dir string, defaults []string) {
	t.Helper()
	all := referenceFile{NonMasqueradeCIDRs: defaults, CIDRLimit: 64}
	path := filepath.Join(dir, "ip-masq-agent")
	if _, err := os.Stat(path); err == nil {
		decode(t, path, &all)
	}
	a.prefixes, a.masqLocal4, a.masqLocal6 = all.NonMasqueradeCIDRs, all.MasqLinkLocal, all.MasqLinkLocalIPv6
	a.stated, a.allowedPrefixes = len(all.NonMasqueradeCIDRs), all.CIDRLimit
}

// unite reads the files of ip-masq-agent-v2, each by itself: a missing key means an empty list, and
// the defaults apply only without any file.
func (a *referenceAgent) unite(t *testing.T, dir string, defaults []string) {
	t.Helper()
	paths := assert.Must(filepath.Glob(filepath.Join(dir, "ip-masq*")))(t)
	a.allowedPrefixes = 64
	if len(paths) == 0 {
		a.prefixes = defaults
	}
	for _, path := range paths {
		var file referenceFile
		decode(t, path, &file)
		for _, p := range file.NonMasqueradeCIDRs {
			if !slices.Contains(a.prefixes, p) {
				a.prefixes = append(a.prefixes, p)
			}
		}
		a.masqLocal4 = a.masqLocal4 || file.MasqLinkLocal
		a.masqLocal6 = a.masqLocal6 || file.MasqLinkLocalIPv6
		a.stated = max(a.stated, len(file.NonMasqueradeCIDRs))
	}
}

func decode(t *testing.T, path string, into *referenceFile) {
	t.Helper()
	text, err := yaml.YAMLToJSON(readFile(t, path))
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		t.Fatalf("the agent refuses %s: %v", path, err)
	}
}

// write creates the agent's chains on a node, and the jumps to them.
func (a referenceAgent) write(t *testing.T, n *node) {
	t.Helper()
	for i, f := range families() {
		if i == 1 && !a.ipv6 {
			continue
		}
		n.feed(t, a.restore(i == 1), f[0]+"-"+n.backend.variant+"-restore", "--noflush")
	}
}

// restore returns the agent's input for iptables-restore or ip6tables-restore.
func (a referenceAgent) restore(ipv6 bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*nat\n:%s - [0:0]\n-A POSTROUTING -m comment --comment \"imitated\" -m addrtype ! --dst-type LOCAL -j %s\n", a.chain, a.chain)
	leave := func(prefix string) {
		fmt.Fprintf(&b, "-A %s -m comment --comment \"exempt\" -d %s -j RETURN\n", a.chain, prefix)
	}
	switch {
	case ipv6 && !a.masqLocal6:
		leave("fe80::/10")
	case !ipv6 && !a.masqLocal4:
		leave(linkLocal)
	}
	for _, p := range a.prefixes {
		if strings.Contains(p, ":") == ipv6 {
			leave(p)
		}
	}
	masquerade := func(how string) {
		if a.random {
			how += " --random-fully"
		}
		fmt.Fprintf(&b, "-A %s -m comment --comment \"masqueraded\" %s\n", a.chain, how)
	}
	for _, protocol := range []string{"tcp", "udp", "sctp"} {
		left := 0
		for _, r := range a.ports {
			left += sizeOf(r)
		}
		for _, r := range a.ports {
			share := ""
			if sizeOf(r) < left {
				share = "-m statistic --mode random --probability " + strconv.FormatFloat(float64(sizeOf(r))/float64(left), 'f', -1, 64)
			}
			left -= sizeOf(r)
			masquerade(fmt.Sprintf("-p %s %s -j MASQUERADE --to-ports %s", protocol, share, r))
		}
	}
	masquerade("-j MASQUERADE")
	b.WriteString("COMMIT\n")
	return b.String()
}

// sizeOf returns the number of ports of "1024-29999" or "7".
func sizeOf(text string) int {
	first, last, ranged := strings.Cut(text, "-")
	if !ranged {
		return 1
	}
	lowest, _ := strconv.Atoi(first)
	highest, _ := strconv.Atoi(last)
	return highest - lowest + 1
}

// chainRules returns a chain and the jumps to it, by the program of iptables that lists them. It leaves out comments and
// rounds probabilities, as both are written in other ways.
func (n *node) chainRules(t *testing.T, chain string) map[string][]string {
	t.Helper()
	comment := regexp.MustCompile(` -m comment --comment ("(\\.|[^"\\])*"|\S+)`)
	probability := regexp.MustCompile(`(--probability 0\.\d{6})\d*`)
	all := map[string][]string{}
	for _, f := range families() {
		for line := range strings.Lines(n.tool(t, f[0], "-t", "nat", "-S")) {
			line = strings.TrimSpace(line)
			isJump := strings.HasPrefix(line, "-A POSTROUTING ") && strings.HasSuffix(line, "-j "+chain)
			if isJump || line == "-N "+chain || strings.HasPrefix(line, "-A "+chain+" ") {
				line = comment.ReplaceAllString(line, "")
				all[f[0]] = append(all[f[0]], probability.ReplaceAllString(line, "$1"))
			}
		}
	}
	return all
}
