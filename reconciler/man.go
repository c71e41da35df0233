// SPDX-License-Identifier: Apache-2.0

//go:build man

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cpuguy83/go-md2man/v2/md2man"
	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"
)

const (
	section    = "8"
	pluginPage = "plugin/ip-masq.8.md"
	rootPage   = "reconciler/ip-masq-reconciler.8.md" // the sections that do not follow from the commands
	usage      = "usage: SOURCE_DATE_EPOCH=SECONDS go run -tags man ./reconciler DIRECTORY"
)

// With the build tag man the program, run in the root of the repository, writes manual pages and the
// completions for shells into a directory: man/*.8, and completions/{bash,zsh,fish}. The program that is
// shipped does not link what this needs.
func main() {
	if err := writeManual(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "man:", err)
		os.Exit(exitError)
	}
}

func writeManual(args []string) error {
	if len(args) != 1 || os.Getenv("SOURCE_DATE_EPOCH") == "" {
		return errors.New(usage)
	}
	root := (&app{out: os.Stdout, err: os.Stderr}).root()
	pages, completions := filepath.Join(args[0], "man"), filepath.Join(args[0], "completions")
	return errors.Join(writePages(root, pages), writeCompletions(root, completions))
}

func writePages(root *cobra.Command, dir string) error {
	sections, errSections := os.ReadFile(rootPage)
	plugin, errPlugin := os.ReadFile(pluginPage)
	if err := errors.Join(os.MkdirAll(dir, 0o755), errSections, errPlugin); err != nil {
		return err
	}
	var date string
	for _, c := range append([]*cobra.Command{root}, root.Commands()...) {
		if !c.IsAvailableCommand() || c.Name() == "help" {
			continue
		}
		c.DisableAutoGenTag = true
		c.Long = strings.Replace(c.Long, "\nExit codes: ", "\n# EXIT STATUS\n", 1)
		var page bytes.Buffer
		h := &doc.GenManHeader{Section: section, Source: "ip-masq " + version, Manual: "ip-masq"}
		if err := doc.GenMan(c, h, &page); err != nil {
			return err
		}
		text := page.String()
		if c == root {
			date = h.Date.Format("Jan 2006")
			_, more, _ := strings.Cut(string(md2man.Render(append([]byte("% _\n"), sections...))), "\n.SH")
			text = strings.Replace(text, "\n.SH SEE ALSO\n", "\n.SH"+more+"\n.SH SEE ALSO\n\\fBip-masq(8)\\fP, ", 1)
			// The pages of commands refer to this one for the settings.
			root.PersistentFlags().VisitAll(func(f *pflag.Flag) { f.Hidden = true })
		} else {
			text += ".PP\nThe settings of the node are options too: see \\fBip-masq-reconciler(8)\\fP.\n"
		}
		if err := write(dir, strings.ReplaceAll(c.CommandPath(), " ", "-"), text); err != nil {
			return err
		}
	}
	header := fmt.Sprintf("%% \"IP-MASQ\" %q %q %q \"ip-masq\"\n", section, date, "ip-masq "+version)
	return write(dir, "ip-masq", string(md2man.Render(append([]byte(header), plugin...))))
}

func write(dir, name, text string) error {
	return os.WriteFile(filepath.Join(dir, name+"."+section), []byte(text), 0o644)
}

// writeCompletions writes them under the names that the shells look for. The plugin takes no arguments.
func writeCompletions(root *cobra.Command, dir string) error {
	for name, generate := range map[string]func(string) error{
		"bash/" + root.Name():           func(file string) error { return root.GenBashCompletionFileV2(file, true) },
		"zsh/_" + root.Name():           root.GenZshCompletionFile,
		"fish/" + root.Name() + ".fish": func(file string) error { return root.GenFishCompletionFile(file, true) },
	} {
		file := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), generate(file)); err != nil {
			return err
		}
	}
	return nil
}
