// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestKeys compares what documents and the chart have about each key with the table of keys; README.md has the usual
// ones. -update writes it. Each key has a section in docs/configure.md and, if it is new, a line in CHANGELOG.md, written by hand.
func TestKeys(t *testing.T) {
	keys := entryKeys()
	configure := read(t, "docs", "configure.md")
	const firstRelease = 4 // the greatest schema of its keys
	usual := strings.Fields("nonMasqueradeCIDRs masqueradeCIDRs enableIPv6 sourceCIDRs nonMasqueradeNamespaces outputAddresses guard backend")
	var readme, reference, manual, values string
	for _, k := range keys {
		if k.Schema > firstRelease && !strings.Contains(read(t, "CHANGELOG.md"), "`"+k.Name+"`") {
			t.Errorf("CHANGELOG.md does not mention %s", k.Name)
		}
		help, meaning, standard := k.Help, coded(k.Help), coded(k.Default)
		if word, is := k.Field.(policy.Word); is {
			choices := word.Choices()
			standard = coded(k.Default, choices...)
			help += ": " + policy.JoinOr(choices)
			meaning += ": " + coded(policy.JoinOr(choices), choices...)
		}
		if slices.Contains(usual, k.Name) {
			readme += fmt.Sprintf("| `%s` | %s | %s |\n", k.Name, standard, meaning)
		}
		reference += fmt.Sprintf("| [`%s`](#%s) | %s | %s | %s |\n", k.Name, sectionOf(t, configure, k.Name), typeOf(t, k).name, standard, k.Sources)
		manual += fmt.Sprintf("**%s** (default: %s)\n%s\n", k.Name, k.Default, wrap(": ", "  ", sentence(help)))
		values += "\n" + wrap("  # ", "  # ", sentence(help)+" "+sentence("unset: "+k.Default)) + exampleInChart(t, k)
	}
	for _, c := range []struct{ file, from, to, text string }{
		{"README.md", "\n| key | default | meaning |\n|---|---|---|\n", "\n", readme},
		{"docs/configure.md", "\n| key | type | default | several sources |\n|---|---|---|---|\n", "\n", reference},
		{"plugin/ip-masq.8.md", "\n**type**\n: ip-masq\n\n", "# ENVIRONMENT\n", manual},
		{"deploy/chart/values.yaml", "\npolicy:\n", "\n# The agents' ConfigMap", strings.TrimPrefix(values, "\n")},
	} {
		before, rest, found := strings.Cut(read(t, c.file), c.from)
		_, after, ends := strings.Cut(rest, "\n"+c.to)
		if !found || !ends {
			t.Fatalf("%s: the place of the keys is not there", c.file)
		}
		golden.Check(t, filepath.Join(root, c.file), before+c.from+strings.TrimSuffix(c.text, "\n")+"\n"+c.to+after)
	}
	const schema = "deploy/chart/values.schema.json"
	blocks := regexp.MustCompile(`(?ms)^ *"nonMasqueradeCIDRs": .*?^( *)"cidrLimit": .*?(,?)$`)
	if n := len(blocks.FindAllString(read(t, schema), -1)); n != 3 {
		t.Fatalf("%s: %d places of the keys, want 3", schema, n)
	}
	var members []string
	for _, k := range keys[:len(keys)-2] { // a plugin entry alone has requireAgentConfig and dataDir
		members = append(members, fmt.Sprintf("$1%q: { %s }", k.Name, typeOf(t, k).schema))
	}
	golden.Check(t, filepath.Join(root, schema), blocks.ReplaceAllString(read(t, schema), strings.Join(members, ",\n")+"$2"))
}

// coded marks keys and values in a text of documents.
func coded(text string, values ...string) string {
	if !strings.Contains(text, " ") && text != "any" && text != "none" {
		return "`" + text + "`"
	}
	for _, k := range entryKeys() {
		values = append(values, k.Name)
	}
	return regexp.MustCompile(`\b(`+strings.Join(values, "|")+`)\b`).ReplaceAllString(text, "`$1`")
}

// sectionOf returns the anchor of the section about a key.
func sectionOf(t *testing.T, text, key string) string {
	t.Helper()
	for _, m := range regexp.MustCompile(`(?m)^### (.+)$`).FindAllStringSubmatch(text, -1) {
		if slices.Contains(strings.Split(m[1], " and "), key) {
			return strings.ToLower(strings.ReplaceAll(m[1], " ", "-"))
		}
	}
	t.Errorf("docs/configure.md has no section about %s", key)
	return ""
}

func sentence(text string) string { return strings.ToUpper(text[:1]) + text[1:] + "." }

// wrap breaks a text into lines of 100 columns.
func wrap(first, others, text string) string {
	lines, line := "", first
	for word := range strings.FieldsSeq(text) {
		if len(line)+len(word) > maxColumns {
			lines, line = lines+strings.TrimRight(line, " ")+"\n", others
		}
		line += word + " "
	}
	return lines + strings.TrimRight(line, " ") + "\n"
}

// entryKeys is the table of keys, with dataDir.
func entryKeys() []policy.Key {
	return append(new(config.Entry).Keys(), policy.Key{Name: "dataDir", Default: config.DefaultDataDir, Help: "directory of the state",
		Sources: "one for each node"})
}

// keyType says how documents and the chart write values of a type.
type keyType struct{ name, example, schema string }

func typeOf(t *testing.T, k policy.Key) keyType {
	t.Helper()
	switch to := k.Field.(type) {
	case **bool, *bool:
		return keyType{"boolean", k.Default, `"type": "boolean"`}
	case *[]netip.Prefix:
		return keyType{"list of CIDRs", "[10.0.0.0/8]", `"$$ref": "#/definitions/cidrs"`}
	case *policy.AddressItems:
		return keyType{"list of CIDRs", "[192.0.2.0/24]", `"$$ref": "#/definitions/addresses"`}
	case *[]string:
		return keyType{"list of names", "[eth0]", `"$$ref": "#/definitions/interfaces"`}
	case *policy.Namespaces:
		return keyType{"list of names", "[kube-system]", `"$$ref": "#/definitions/namespaces"`}
	case **policy.Ports:
		return keyType{"string", `"1024-29999,32768-65535"`, `"$$ref": "#/definitions/ports"`}
	case **policy.Mark:
		return keyType{"string", `"0x6000"`, `"$$ref": "#/definitions/mark"`}
	case *string:
		return keyType{"string", k.Default, `"$$ref": "#/definitions/chain"`}
	case policy.Word:
		schema := `"enum": [ "` + strings.Join(to.Choices(), `", "`) + `" ]`
		if slices.Contains(to.Choices(), "off") { // which is false in YAML
			schema = strings.Replace(schema, " ]", ", false ]", 1)
		}
		return keyType{"string", to.Choices()[0], schema}
	case *int:
		return keyType{"number", k.Default, fmt.Sprintf(`"type": "integer", "minimum": 1, "maximum": %d`, policy.MaxCIDRLimit)}
	case nil:
		return keyType{"path", k.Default, ""}
	}
	t.Fatalf("%s has a type that documents do not have yet", k.Name)
	return keyType{}
}

// exampleInChart returns the line of values.yaml with a value. The chart itself states backend and guard.
func exampleInChart(t *testing.T, k policy.Key) string {
	t.Helper()
	switch k.Name {
	case "backend":
		return "  backend: nftables\n"
	case "guard":
		return "  guard: count\n"
	}
	return fmt.Sprintf("  # %s: %s\n", k.Name, typeOf(t, k).example)
}

// TestSettings compares what the reference, the packages and the chart have of each setting with the table.
func TestSettings(t *testing.T) {
	_, text, _ := strings.Cut(read(t, "docs", "reconciler.md"), "```toml\n")
	reference, _, _ := strings.Cut(text, "```\n")
	packaged := regexp.MustCompile(`(?m)^# (\w+ *= |\[)`).ReplaceAllString(read(t, "tools", "release", "package", "conf", "reconciler.toml"), "$1")
	in := map[string]config.Settings{}
	for where, text := range map[string]string{"docs/reconciler.md": reference, "reconciler.toml of the packages": packaged} {
		s, path := config.DefaultSettings(), filepath.Join(t.TempDir(), "reconciler.toml")
		assert.NoError(t, errors.Join(os.WriteFile(path, []byte(text), 0o600), s.Read(path)))
		in[where] = s
	}
	var chart struct {
		Properties struct {
			Reconciler struct {
				Properties map[string]struct{ Properties map[string]any }
			}
		}
	}
	assert.NoError(t, json.Unmarshal([]byte(read(t, "deploy", "chart", "values.schema.json")), &chart))
	const byOtherValues = "backend cni_conf_dir cni_bin_dir agent_config_dir data_dir health_listen metrics_listen conflist.manage conflist.entry_file"
	for _, setting := range config.DefaultSettings().List() {
		parent, key, inTable := strings.Cut(setting.Key, ".")
		if parent == "agent" {
			continue // keys of policy
		}
		for where, s := range in {
			i := slices.IndexFunc(s.List(), func(x config.Setting) bool { return x.Key == setting.Key })
			if x := s.List()[i]; x.Origin == config.DefaultOrigin || x.Value != setting.Value && x.Key != "conflist.manage" {
				t.Errorf("%s: %s is %q (%s), and its default is %q", where, x.Key, x.Value, x.Origin, setting.Value)
			}
		}
		_, isThere := chart.Properties.Reconciler.Properties[parent]
		if inTable {
			_, isThere = chart.Properties.Reconciler.Properties[parent].Properties[key]
		}
		if isThere == slices.Contains(strings.Fields(byOtherValues), setting.Key) {
			t.Errorf("values.schema.json: %s is there: %t", setting.Key, isThere)
		}
	}
}
