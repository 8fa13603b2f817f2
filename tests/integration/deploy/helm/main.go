// Renders a Helm chart as `helm template` does.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
)

func main() {
	if err := render(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "helm-render:", err)
		os.Exit(1)
	}
}

func render(directory, values string) error {
	chart, err := loader.Load(directory)
	if err != nil {
		return err
	}
	given := map[string]interface{}{}
	if err := json.Unmarshal([]byte(values), &given); err != nil {
		return err
	}
	release := chartutil.ReleaseOptions{Name: "example", Namespace: "default", Revision: 1, IsInstall: true}
	all, err := chartutil.ToRenderValues(chart, given, release, chartutil.DefaultCapabilities)
	if err != nil {
		return err
	}
	files, err := engine.Engine{Strict: true}.Render(chart, all)
	if err != nil {
		return err
	}
	names := make([]string, 0, len(files))
	for name := range files {
		if filepath.Ext(name) == ".yaml" && strings.TrimSpace(files[name]) != "" {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	for _, name := range names {
		fmt.Printf("---\n# Source: %s\n%s\n", name, files[name])
	}
	return nil
}
